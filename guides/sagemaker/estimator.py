"""A training job for SageMaker with SDK v2: `python estimator.py` creates it, with the keys of an account."""

from sagemaker.pytorch import PyTorch

PyTorch(
    entry_point="jobs/train_ddp.py",
    source_dir="packed",
    image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.1",
    role="arn:aws:iam::123456789012:role/training",
    instance_type="ml.p4d.24xlarge",
    instance_count=2,
    hyperparameters={"train_url": "/opt/ml/checkpoints", "save_every": "300s"},
    checkpoint_s3_uri="s3://bucket/runs/1",
    checkpoint_local_path="/opt/ml/checkpoints",
    max_run=86400,
    use_spot_instances=True,
    max_wait=172800,
).fit(wait=False)

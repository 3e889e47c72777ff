"""The loader of a training loop: batches on the device, with their step and a receipt."""

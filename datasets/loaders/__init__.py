"""From bytes to batches on the device."""

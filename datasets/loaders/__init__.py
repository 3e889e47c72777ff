"""From the bytes of stores to batches on the device."""

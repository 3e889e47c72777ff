"""Data sets, stores and loaders. Import the submodules: `from datasets.memory import cifar10`."""

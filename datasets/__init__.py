"""What is learned from, and how it arrives. Import the submodules: `from datasets import cifar10, order`."""

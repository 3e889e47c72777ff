"""Say why a file is not a checkpoint of torch.save(), and how to convert it. Only a refusal loads this."""

CONVERT = "python -c \"import torch; torch.save({}, 'new.pth')\""  # of a state_dict
_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first bytes of torch before 1.6
_GIT_LFS = b"version https://git-lfs"


def explain_start(path: str, start: bytes, expected: bytes) -> str:
    """Return the reason for a file with another beginning, such as an HTML page of a failed download."""
    reason = f"it begins with {start[:15]!r}, expected {expected!r}: torch.save writes a zip file"
    if start.startswith(_BEFORE_1_6):
        convert = CONVERT.format(f"torch.load({path!r}, weights_only=True)")
        return f"{reason}; it is of torch before 1.6. With torch 2.6 or later, or if you trust it: {convert}"
    return f"{reason}; it is a pointer of Git LFS: git lfs pull" if start.startswith(_GIT_LFS) else reason


def explain_script(path: str) -> str:
    """Return the reason for an archive of TorchScript."""
    convert = CONVERT.format(f"torch.jit.load({path!r}).state_dict()")
    return f"it is a TorchScript archive, a program: save model.state_dict(); if you trust it: {convert}"


def explain_objects(path: str) -> str:
    """Return the reason for a file with pickled objects that are not tensors or plain types."""
    convert = CONVERT.format(f"torch.load({path!r}, weights_only=False).state_dict()")
    return (
        "torch cannot load it: it is damaged, or holds objects that are not tensors or plain types (save "
        "model.state_dict(), not the model). If you trust it, with its modules on PYTHONPATH: "
        f"{convert} (of a dictionary: ['state_dict'], for example, in place of .state_dict())"
    )

"""Make the dependency list that a platform installs before the boot file starts. `pack` writes it."""

import importlib.metadata
import os
import re

from bootfile.ground.errors import BadInput

# The platform's image has these, for its driver and GPUs. torchaudio needs one version of torch.
_OF_THE_IMAGE = re.compile(r"torch|torch-npu|torchvision|torchaudio|triton|nvidia-.+")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_OF_THIS_MACHINE = re.compile(
    r"(?:-e|--editable|-c|--constraint)\b|(?:-f|--find-links)[ =](?!\s*https?:)|\.{0,2}/|file:"
)


def adapt(path: str, imported: set[str]) -> tuple[str, list[str]]:
    """Return (text, omitted names) of the list to install, from the one at `path`.

    imported: the packages that the job imports when it starts, by their names in Python. A line of another
    one that ends in a comment `# for: OPTION` becomes a comment.

    torch, torch_npu, torchvision, torchaudio, triton and nvidia-* would replace those of the image, and are
    omitted. Lines about files of this machine are also omitted. Environment markers stay. Raises BadInput.
    """
    kept = []
    left_out = []
    for line in _read_lines(path):
        named = _NAME.match(line)
        package = re.sub(r"[-_.]+", "-", named[0].lower()) if named else ""  # as indexes compare names
        requirement, _, reason = map(str.strip, line.partition("# for:"))
        if _OF_THE_IMAGE.fullmatch(package) or _OF_THIS_MACHINE.match(requirement):
            left_out.append(package or requirement.split()[0])
        elif not reason or imported & _list_packages(package):
            kept.append(requirement)
        else:
            kept.append(f"# {requirement}  (for: {reason})")
    return "".join(f"{line}\n" for line in kept), left_out


def _list_packages(distribution: str) -> set[str]:
    """Return the names in Python of what an installed distribution holds; none if it is not installed."""
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return set()
    listed = installed.read_text("top_level.txt")
    if listed:
        return {*listed.split()}
    return {file.parts[0].partition(".")[0] for file in installed.files or ()}


def names(text: str) -> list[str]:
    """Return the packages of an adapted list, each once, without those in comments."""
    matches = filter(None, map(_NAME.match, text.splitlines()))
    return list(dict.fromkeys(match[0] for match in matches))


def _read_lines(path: str) -> list[str]:
    """Return the requirements of a file, without comments and continuations."""
    folder = os.path.realpath(os.path.dirname(path))
    if os.path.commonpath([folder, os.path.realpath(path)]) != folder:
        raise BadInput(f"{path} is not in the code folder, but its lines would be uploaded")
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = re.sub(r"\\\r?\n\s*", " ", file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error
    lines: dict[str, None] = {}  # each once, in order
    for raw in text.splitlines():
        line = re.sub(r"(^|\s+)#(?! for:).*", "", raw).strip()
        if re.match("-r|--requirement", line):
            raise BadInput(f"{path} includes another list, {line}: put its lines here instead")
        if line:
            lines[line] = None
    return list(lines)

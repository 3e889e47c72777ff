"""What looks like a secret must not be written into a job: its environment and its parameters are stored and
shown in clear, in the console and by the service's API, to everyone who may look at the job."""

import re

from common.exits import BadInput
from launch.pack import secret_scan

_NAME = re.compile(
    r"(^|_|-)(SECRET|PASSWORD|PASSWD|PASSPHRASE|TOKEN|CREDENTIALS?|APIKEY|SK|AK)(_|-|$)"
    r"|(ACCESS|API|PRIVATE|SECRET|AUTH)_?-?KEY",
    re.IGNORECASE,
)
_USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]+@")


def refuse(place: str, name: str, value: str) -> None:
    """Raises BadInput, without the value, where a name or a value looks like a secret."""
    if _looks_secret(name, value) or _USER_INFO.search(value):
        raise BadInput(
            f"[{place}] {name} looks like a secret, and everyone who sees the job would see it: give the job "
            "its rights through the platform (an agency on ModelArts, a role on SageMaker, a mounted secret "
            "on Kubernetes)"
        )


def shown(name: str, value, texts: bool = True) -> str:
    """A value as an error shows it: no user name or password of a URL, not the end of a long one. Not shown:
    what looks like a secret, a text of several lines, a list or table with texts in it; without `texts`, any
    text."""
    text = repr(value)
    if isinstance(value, str):
        hidden = not texts or len(value.splitlines()) > 1
    else:
        hidden = "'" in text or '"' in text
    if hidden or _looks_secret(name, str(value)):
        return "(not shown)"
    text = _USER_INFO.sub("***@", text)
    return text if len(text) <= 120 else f"{text[:120]}..."


def _looks_secret(name: str, value: str) -> bool:
    found = secret_scan.scan_text("job.toml", f'{name} = "{value}"'.encode())
    return bool(found or _NAME.search(name))

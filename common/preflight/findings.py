"""What a check of the node says of one subject."""

from dataclasses import dataclass

_CODES = {
    "accelerators": 10, "shm": 11, "outputs": 12, "scratch": 12, "limits": 13, "master": 14, "interface": 14,
    "versions": 15, "packages": 15,
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One subject of the check. verdict: "ok", "warning" or "error"; code: that of the table, 0 without an
    error."""

    name: str
    verdict: str
    text: str
    code: int

    def __str__(self) -> str:
        return f"check name={self.name} verdict={self.verdict} {self.text}"


def finding(name: str, facts: str, errors: list[str], warnings: list[str]) -> Finding:
    """errors and warnings: sentences; the worst of them is the verdict."""
    worst = "error" if errors else "warning" if warnings else "ok"
    text = "; ".join([*([facts] if facts else []), *errors, *warnings])
    return Finding(name, worst, " ".join(text.split()), _CODES[name] if errors else 0)

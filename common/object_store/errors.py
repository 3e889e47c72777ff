"""Explain the errors of an object store in one line that a user can act on."""

import errno
import os
from typing import Any, NamedTuple

from common.exits import BadInput

_CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CAUSES = {  # cause: error codes of S3 and OBS that no retry can cure
    "the credentials have expired: renew them": "ExpiredToken ExpiredTokenException TokenRefreshRequired",
    "the session token is not accepted: renew the credentials": "InvalidToken",
    "the credentials are not accepted": "InvalidSecurity 401",
    "the store does not know the access key": "InvalidAccessKeyId",
    "the secret key does not belong to the access key": "SignatureDoesNotMatch",
    "no permission": "AccessDenied AllAccessDisabled Forbidden 403",
    "no permission: there is a problem with the account": "AccountProblem",
    "no such bucket": "NoSuchBucket",
    "no such object": "NoSuchKey NotFound 404",
    "the unfinished upload is gone: something else ended it": "NoSuchUpload",
    "the name of the bucket is not valid": "InvalidBucketName",
    "the range begins after the end of the object": "InvalidRange 416",
    "the object was replaced while it was read": "PreconditionFailed 412",
    "the object is archived: restore it first": "InvalidObjectState",
    "the object is larger than the store accepts": "EntityTooLarge",
    "the store does not have this function": "NotImplemented",
    "the key is too long": "KeyTooLongError",
    "the bucket is full": "QuotaExceeded InsufficientStorageSpace",
    "the bucket is in another region: set the endpoint of that region": (
        "PermanentRedirect TemporaryRedirect 301 307"
    ),
    "the bucket is in another region: set AWS_DEFAULT_REGION": "AuthorizationHeaderMalformed",
}
_PERMANENT = {code: cause for cause, codes in _CAUSES.items() for code in codes.split()}
# codes of status 4xx that a retry can cure
_PASSING = {
    "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "OperationAborted",
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "TooManyRequestsException",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "ConditionalRequestConflict",
}  # fmt: skip


class StoreError(BadInput):
    """A request to an object store failed. The message names the bucket, the key and the cause.

    reason: the store's own code ("NoSuchBucket"), or one word of this project ("unreachable", "disk").
    """

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason


class Damaged(Exception):
    """Received bytes differ from the sent ones. The message says whether they are truncated or changed."""


class Trouble(NamedTuple):
    """The meaning of an error. cause: text for the user; again: a retry may help; busy: all threads wait."""

    cause: str
    reason: str
    again: bool
    busy: bool = False


def explain(error: Exception, endpoint: str) -> Trouble | None:
    """Return the meaning of an exception of boto3 or the network; None for any other exception.

    endpoint: the name of the server for messages. The server's text is not repeated: it may quote a request.
    """
    from botocore import exceptions as boto

    if isinstance(error, Damaged):
        return Trouble(str(error), "damaged", True)
    if isinstance(error, boto.ClientError):
        return _of_the_server(error)
    name = type(error).__name__
    cut = f"{endpoint} did not end the answer ({name})"
    for kinds, cause, reason, again in (
        (boto.NoCredentialsError, f"no credentials: set {_CREDENTIALS}", "credentials", False),
        (boto.PartialCredentialsError, f"a credential is missing: set {_CREDENTIALS}", "credentials", False),
        (
            (boto.CredentialRetrievalError, boto.ProfileNotFound),
            f"the credentials cannot be read ({name})",
            "credentials",
            False,
        ),
        (boto.SSLError, f"{endpoint} has no certificate that this machine trusts", "unreachable", False),
        (
            (boto.EndpointConnectionError, boto.ProxyConnectionError),
            f"{endpoint} cannot be reached",
            "unreachable",
            True,
        ),
        (boto.ConnectTimeoutError, f"{endpoint} does not answer", "unreachable", True),
        ((TimeoutError, boto.ReadTimeoutError), f"{endpoint} stopped answering", "unreachable", True),
        (boto.ParamValidationError, "the name of the bucket or of the object is not valid", "name", False),
        ((boto.BotoCoreError, ConnectionError), cut, "broken", True),
    ):
        if isinstance(error, kinds):
            return Trouble(cause, reason, again)
    if type(error).__module__.startswith(("urllib3.", "http.")):
        if name == "ReadTimeoutError":
            return Trouble(f"{endpoint} stopped answering", "unreachable", True)
        return Trouble(cut, "broken", True)
    return None


def _of_the_server(error: Any) -> Trouble:
    code = str(error.response.get("Error", {}).get("Code") or "unknown")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "RequestTimeTooSkewed":
        sent = error.response["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        clock = f", that of the store is {sent}" if sent else ""
        return Trouble(f"the clock of this machine is wrong{clock} ({code})", code, False)
    if code in _PERMANENT:
        return Trouble(f"{_PERMANENT[code]} ({code})", code, False)
    again = status >= 500 or status in (408, 429) or code in _PASSING
    busy = status in (429, 503) or "SlowDown" in code or "Throttling" in code
    cause = "the store is too busy" if busy else "the store failed" if again else "the store refused"
    code = code if code.isalnum() and len(code) < 60 else "unknown"
    return Trouble(f"{cause} (status {status}, {code})", code, again or busy, busy)


def of_the_disk(error: OSError, path: str) -> StoreError:
    """Return the error for a file of this node that cannot be read or written, with the free space."""
    cause = error.strerror or str(error)
    folder = os.path.dirname(path)
    if error.errno in _FULL:
        try:
            space = os.statvfs(folder)
            cause = f"{cause} ({space.f_bavail * space.f_frsize / 1e6:.1f} MB free)"
        except OSError:  # the folder is also gone: the first reason is enough
            pass
    return StoreError(f"{shown(path)}: {cause}", "disk")


def is_full(error: OSError) -> bool:
    """Return whether the disk or the quota is full."""
    return error.errno in _FULL


def shown(text: str) -> str:
    """Return a key or a path for a message, as one line."""
    return text if text.isprintable() else ascii(text)

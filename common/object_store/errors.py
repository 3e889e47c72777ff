"""What went wrong between here and an object store, as one line that a user can act on."""

import errno
import os
from typing import NamedTuple

from common.exits import BadInput

_CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# error codes of S3 and OBS that no second attempt can cure, and what they mean
_PERMANENT = {
    "ExpiredToken": "the credentials have expired: renew them",
    "ExpiredTokenException": "the credentials have expired: renew them",
    "TokenRefreshRequired": "the credentials have expired: renew them",
    "InvalidToken": "the session token is not accepted: renew the credentials",
    "InvalidSecurity": "the credentials are not accepted",
    "InvalidAccessKeyId": "the access key is not known there",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key",
    "AccessDenied": "no permission",
    "AllAccessDisabled": "no permission",
    "AccountProblem": "no permission: there is a problem with the account",
    "Forbidden": "no permission",
    "403": "no permission",
    "401": "the credentials are not accepted",
    "NoSuchBucket": "there is no such bucket",
    "NoSuchKey": "there is no such object",
    "NotFound": "there is no such object",
    "404": "there is no such object",
    "NoSuchUpload": "the unfinished upload is gone: something else ended it",
    "InvalidBucketName": "the name of the bucket is not valid",
    "InvalidRange": "the range lies behind the end of the object",
    "416": "the range lies behind the end of the object",
    "PreconditionFailed": "the object was replaced while it was read",
    "412": "the object was replaced while it was read",
    "InvalidObjectState": "the object is archived: restore it first",
    "EntityTooLarge": "the object is larger than the store takes",
    "KeyTooLongError": "the key is too long",
    "QuotaExceeded": "the bucket is full",
    "InsufficientStorageSpace": "the bucket is full",
    "PermanentRedirect": "the bucket is in another region: set the endpoint of that region",
    "TemporaryRedirect": "the bucket is in another region: set the endpoint of that region",
    "AuthorizationHeaderMalformed": "the bucket is in another region: set AWS_DEFAULT_REGION",
    "301": "the bucket is in another region: set the endpoint of that region",
    "307": "the bucket is in another region: set the endpoint of that region",
}
# of status 4xx, and yet cured by another attempt
_PASSING = {
    "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch", "OperationAborted",
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "TooManyRequestsException",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "ConditionalRequestConflict",
}  # fmt: skip


class StoreError(BadInput):
    """An object store did not do what was asked; the message names the bucket, the key and the cause.

    reason: the store's own code ("NoSuchBucket"), or one word of ours ("unreachable", "damaged", "disk").
    """

    def __init__(self, message: str, reason: str = ""):
        super().__init__(message)
        self.reason = reason


class Damaged(Exception):
    """What arrived is not what was sent: cut, or with other bytes. The message says which."""


class Trouble(NamedTuple):
    """cause: for the user; again: whether another attempt may help; busy: whether all should wait."""

    cause: str
    reason: str
    again: bool
    busy: bool = False


def explain(error: Exception, endpoint: str) -> Trouble | None:
    """What an exception of boto3, of the network or of the disk means; None: it is none of these.

    endpoint: what the user knows the server by. No text of the server's is repeated: it may quote a request.
    """
    from botocore import exceptions

    if isinstance(error, Damaged):
        return Trouble(str(error), "damaged", True)
    if isinstance(error, exceptions.ClientError):
        return _of_the_server(error)
    if isinstance(error, exceptions.NoCredentialsError):
        return Trouble(f"there are no credentials: set {_CREDENTIALS}", "credentials", False)
    if isinstance(error, exceptions.PartialCredentialsError):
        return Trouble(f"half of the credentials is missing: set {_CREDENTIALS}", "credentials", False)
    if isinstance(error, exceptions.CredentialRetrievalError | exceptions.ProfileNotFound):
        return Trouble(f"the credentials cannot be read ({type(error).__name__})", "credentials", False)
    if isinstance(error, exceptions.SSLError):
        return Trouble(f"{endpoint} has no certificate that this machine trusts", "unreachable", False)
    if isinstance(error, exceptions.EndpointConnectionError | exceptions.ProxyConnectionError):
        return Trouble(f"{endpoint} cannot be reached", "unreachable", True)
    if isinstance(error, exceptions.ConnectTimeoutError):
        return Trouble(f"{endpoint} does not answer", "unreachable", True)
    if isinstance(error, TimeoutError) or type(error).__name__ == "ReadTimeoutError":  # botocore's, urllib3's
        return Trouble(f"{endpoint} stopped answering", "unreachable", True)
    if isinstance(error, exceptions.ParamValidationError):
        return Trouble("the name of the bucket or of the object is not valid", "name", False)
    if isinstance(error, exceptions.BotoCoreError):  # closed connections, answers that are no answers
        return Trouble(f"{endpoint} broke the answer off ({type(error).__name__})", "broken", True)
    if isinstance(error, ConnectionError) or type(error).__module__.startswith(("urllib3.", "http.")):
        return Trouble(f"{endpoint} broke the answer off ({type(error).__name__})", "broken", True)
    return None


def _of_the_server(error) -> Trouble:
    code = str(error.response.get("Error", {}).get("Code") or "unknown")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code == "RequestTimeTooSkewed":
        sent = error.response["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        clock = f", {sent} there" if sent else ""
        return Trouble(f"the clock of this machine is wrong{clock} ({code})", code, False)
    if code in _PERMANENT:
        return Trouble(f"{_PERMANENT[code]} ({code})", code, False)
    again = status >= 500 or status in (408, 429) or code in _PASSING
    busy = status in (429, 503) or "SlowDown" in code or "Throttling" in code
    cause = "the store is too busy" if busy else "the store failed" if again else "the store refused"
    code = code if code.isalnum() and len(code) < 60 else "unknown"
    return Trouble(f"{cause} (status {status}, {code})", code, again or busy, busy)


def of_the_disk(error: OSError, path: str) -> StoreError:
    """A file of this machine that cannot be read or written, with the room that is left."""
    cause = error.strerror or str(error)
    folder = os.path.dirname(path)
    if error.errno in _FULL:
        try:
            space = os.statvfs(folder)
            cause = f"{cause} ({space.f_bavail * space.f_frsize / 1e6:.1f} MB free)"
        except OSError:  # the folder is gone as well: the first reason is enough
            pass
    return StoreError(f"{shown(path)}: {cause}", "disk")


def is_full(error: OSError) -> bool:
    return error.errno in _FULL


def shown(text: str) -> str:
    """A key or a path for a message: one line, whatever it holds."""
    return text if text.isprintable() else ascii(text)

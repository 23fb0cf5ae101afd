"""Find the keys of an object store: in the environment, or in a file. They are never logged or recorded."""

from __future__ import annotations

import configparser
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.environment import inherited
from clusterctl.errors import UsageError
from clusterctl.storage.address import Address, StoreOptions, endpoint_fault

AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
OBS = ("OBS_ACCESS_KEY_ID", "OBS_SECRET_ACCESS_KEY", "OBS_SECURITY_TOKEN")
FIELDS = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
OTHERS = (
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_PROFILE",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "OBS_ENDPOINT",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
)


@dataclass(frozen=True)
class Access:
    """The values that a program needs to reach a store. The keys are not part of its repr."""

    address: Address
    endpoint: str = ""
    region: str = ""
    keys: tuple[str, str, str] | None = field(default=None, repr=False)
    """Id, secret and token; None: the node's own."""

    def order(self) -> dict[str, object]:
        """Return the part of an order for the node's program that describes how to reach the store."""
        return {
            "scheme": self.address.scheme,
            "bucket": self.address.bucket,
            "endpoint": self.endpoint,
            "region": self.region,
            "keys": list(self.keys) if self.keys else None,
        }


def access_to(address: Address, options: StoreOptions) -> Access:
    """Return how to reach a store from this process's environment and a job's options."""
    variables = inherited((*AWS, *OBS, *OTHERS))
    is_obs = address.scheme == "obs"
    names = (*(("OBS_ENDPOINT",) if is_obs else ()), "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    endpoint = options.endpoint or next((variables[name] for name in names if variables.get(name)), "")
    if endpoint and (found := endpoint_fault(endpoint))[0]:
        raise UsageError(f"{address}: endpoint: {found[0]}", found[1])
    if is_obs and not endpoint:
        remedy = "storage: {endpoint: https://obs.REGION.myhuaweicloud.com}, or $OBS_ENDPOINT"
        raise UsageError(f"{address}: no endpoint is named", remedy)
    region = options.region or variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or ""
    if options.credentials:
        keys = _of_file(
            Path(options.credentials).expanduser(), variables.get("AWS_PROFILE", "default"), strict=True
        )
    else:
        keys = (
            (is_obs and _of_variables(variables, OBS)) or _of_variables(variables, AWS) or _usual(variables)
        )
    return Access(address, endpoint, region, keys or None)


def _of_variables(variables: dict[str, str], names: tuple[str, str, str]) -> tuple[str, str, str] | None:
    key, secret, token = (variables.get(name, "") for name in names)
    return (key, secret, token) if key and secret else None


def _usual(variables: dict[str, str]) -> tuple[str, str, str] | None:
    file = Path(variables.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    profile = variables.get("AWS_PROFILE", "default")
    return _of_file(file, profile, strict=False) if file.is_file() else None


def _of_file(path: Path, profile: str, *, strict: bool) -> tuple[str, str, str] | None:
    """Return the keys in a file of Amazon's form; a file that a job names must have them, and be private."""
    reader = configparser.ConfigParser(interpolation=None, default_section="")
    try:
        if strict and path.stat().st_mode & 0o077:
            raise UsageError(f"{path}: other users can read it", f"chmod 600 {path}")
        reader.read_string(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise UsageError(
            f"{path}: {problem.strerror}", "name a file with the keys: storage: {credentials: FILE}"
        ) from None
    except (configparser.Error, UnicodeDecodeError):
        # The error's own text would repeat lines of the file.
        raise UsageError(
            f"{path}: is not a file of keys", "write [default], aws_access_key_id = ..., as Amazon's"
        ) from None
    values = dict(reader[profile]) if reader.has_section(profile) else {}
    key, secret, token = (values.get(name, "") for name in FIELDS)
    if key and secret:
        return key, secret, token
    if strict:
        raise UsageError(
            f"{path}: [{profile}] has no {FIELDS[0]} and {FIELDS[1]}", "add both, or set AWS_PROFILE"
        )
    return None

"""Internals of the Tinker SDK that the project uses. Only this module imports them."""

from tinker.lib.base_url import resolve_base_url
from tinker.lib.public_interfaces.backcompat_sampling_client_future import BackcompatSamplingClientFuture

__all__ = ["BackcompatSamplingClientFuture", "resolve_base_url"]

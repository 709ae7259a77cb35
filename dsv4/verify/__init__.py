"""Comparing this library with stored numbers of a reference implementation, tensor by tensor."""

from dsv4.verify.folder import Job, verify
from dsv4.verify.report import Check, Report, Tolerance
from dsv4.verify.session import VerifyOptions

__all__ = ["Check", "Job", "Report", "Tolerance", "VerifyOptions", "verify"]

"""The public interface for packages that draft tokens on the host; docs/howto-runtime.md describes it."""

from llmc_runtime.sched.host_draft import Draft, DraftContext

__all__ = ["Draft", "DraftContext"]

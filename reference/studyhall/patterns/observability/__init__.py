"""One structured log line and one measurement per execution. `metrics` alone needs prometheus-client."""

from .lines import HumanLines, JsonLines, bind, configure_logging, log_execution, logged

__all__ = ["HumanLines", "JsonLines", "bind", "configure_logging", "log_execution", "logged"]

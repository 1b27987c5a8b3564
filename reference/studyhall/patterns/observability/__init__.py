"""One structured log line and one measurement per execution. `metrics` alone needs prometheus-client."""

from .lines import WORKER, HumanLines, JsonLines, bind, configure_logging, log_execution, logged

__all__ = ["WORKER", "HumanLines", "JsonLines", "bind", "configure_logging", "log_execution", "logged"]

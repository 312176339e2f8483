"""Running algorithms: rounds, evaluation, checkpoints, studies."""

from fedjax_pers.simulate.run import History, RejectedUploads, Table, evaluate_clients, run, start

__all__ = ["History", "RejectedUploads", "Table", "evaluate_clients", "run", "start"]

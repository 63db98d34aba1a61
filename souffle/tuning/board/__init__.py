"""GPUs that are not here: boards behind TVM's RPC tracker, which are sent machine code and need no compiler."""

from souffle.tuning.board.address import BoardAddress, parse_board_address
from souffle.tuning.board.jobs import device, job_seconds, measure
from souffle.tuning.board.line import BoardError

__all__ = ["BoardAddress", "BoardError", "device", "job_seconds", "measure", "parse_board_address"]

"""A rank after the first: loads its part and runs the steps that the first one sends, until that hangs up."""

from __future__ import annotations

import logging
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from onbeat.engine.forward import ForwardPass
from onbeat.engine.load import open_weights
from onbeat.engine.parallel.group import RankGroup, RanksUnreachable
from onbeat.engine.parallel.layers import load_part
from onbeat.engine.parallel.messages import Failed, Loaded, RankJob, Scrub, Started, ToRank

logger = logging.getLogger("onbeat.engine")


def run_rank(connection: Connection) -> None:
    """Load what the first message says, and serve; failures are told to the first rank."""
    try:
        job: RankJob = connection.recv()
        torch.set_num_threads(job.device.num_threads)
        connection.send(Started())
        forward = load_part(job, open_weights(job.config), RankGroup(job.shard, job.meeting_file))
        connection.send(Loaded())
        serve_steps(connection, forward)
    except (EOFError, ConnectionError):
        return  # the first rank has closed the connection, or has ended
    except RanksUnreachable as error:
        _say(connection, Failed(str(error), is_consequence=True))
    except Exception as error:  # the outermost loop of this process: the first rank reports what it says
        logger.exception("a tensor-parallel rank failed")
        _say(connection, Failed(f"{type(error).__name__}: {error}", is_consequence=False))


def serve_steps(connection: Connection, forward: ForwardPass) -> None:
    """Run what is sent.

    The first rank alone holds requests and samples; a step comes with the tokens that it runs, so nothing is
    kept here from step to step but the KV cache.

    Raises
    ------
    EOFError : the connection was closed.
    RanksUnreachable : a rank went away within a step.
    """
    while True:
        message: ToRank = connection.recv()
        if isinstance(message, Scrub):
            forward.scrub(message.block_ids)
        else:
            forward.run(message, wants_logits=True)


def _say(connection: Connection, message: Failed) -> None:
    with suppress(OSError):  # nobody may be there to hear it
        connection.send(message)

"""Runs that are interleaved with those of another program, which says when: a GPU at its power limit is a tenth slower at one time than
at another, so what is compared has to run side by side.

The program writes requests to every rank's standard input, a JSON object a line, and each rank answers with a line on its standard
output: `{"case": ...}` is to be made ready, and answered by what is known of its ways; `{"run": N, "hold": S}` runs the Nth of them
once, held for S seconds, and is answered by this rank's seconds and those in which its host enqueued it. What else is printed goes
to standard error. The end of the input is the end.
"""

import json
import os
import sys
from contextlib import nullcontext

from common.command_line import first_line, note
from common.pytorch import dist, torch
from common.ranks import once, seconds


class Way:
    """What runs, within what, and what is known of it: names, and its error over its bound."""

    def __init__(self, run, within=nullcontext, **known):
        self.run, self.within, self.known = run, within, known

    def once(self, hold):
        with self.within():
            return once(self.run, hold)

    def seconds(self, iterations):
        with self.within():
            return seconds(self.run, iterations)


def serve(ways_of):
    """Answers requests until there are none. `ways_of` gives the ways of a case, one after the other."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ways = []
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            # Before the next ones take their memory.
            ways = []
            torch.cuda.empty_cache()
            ways = list(ways_of(**request["case"]))
            answer = [way.known for way in ways]
        else:
            answer = ways[request["run"]].once(request["hold"])
        print(json.dumps(answer), file=answers, flush=True)


def ready(prepare, **names):
    """What `prepare` gives: a peer that cannot, or errs, is no reason to lose the others. Ways whose results are wrong are left out.
    `names` are its own."""
    who = ", ".join(map(str, filter(None, names.values())))
    try:
        for way in prepare():
            error = way.known["error_over_bound"] if isinstance(way, Way) else 0.0
            if error <= 1.0:
                yield way
            else:
                note_once(f"{who}: results are {error:.1f} times their bound off; not timed")
    except Exception as error:
        note_once(f"{who}: {first_line(error)}")


def note_once(text):
    """One of the ranks says it, or the only process."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        note(text)

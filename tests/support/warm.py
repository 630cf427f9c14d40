"""Imported by the server process that children are forked from (child.py), so that none of them imports torch again."""

import functools
import gc

import torch._dynamo  # noqa: F401 - what torch imports when it first maps a function over samples, as FedCurv does
import typer.main

import everfed.cli
import everfed.engines.processes
import everfed.session
from everfed.data.sources import load

typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(everfed.cli.app)
load("digits")
gc.freeze()  # a collection in a child would copy all pages of what is here

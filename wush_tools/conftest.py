"""Fixtures that several files of tests share, so that each is made once."""
import os

os.environ["TRITON_INTERPRET"] = "1"      # before Triton is imported: its kernels run on the CPU

from wush_tools.testing import caches, no_weights, pair, report, shelf

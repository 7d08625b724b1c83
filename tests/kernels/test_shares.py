"""Items shared out to threads (src/shares.h): each is taken once, whoever is late."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.each import each

SRC = Path(__file__).parents[2] / "pydtnn/kernels/cpu/src"
COMPILER = os.environ.get("CC", "cc")

PROGRAM = """
#include <pthread.h>
#include <stdlib.h>

#include "shares.h"

struct work { struct share *share; int shares, own, *taken; };

static void *take(void *given) {
    struct work *work = given;
    for (ptrdiff_t i; (i = share_next(work->share, work->shares, work->own)) >= 0;)
        __atomic_fetch_add(&work->taken[i], 1, __ATOMIC_RELAXED);
    return NULL;
}

/* The owners of the first stretches take all items; count how often each was taken. */
int run(int shares, int owners, ptrdiff_t items, int *taken) {
    struct share *share = aligned_alloc(64, (size_t)shares * sizeof *share);
    struct work work[16];
    pthread_t thread[16];
    int started = 0;
    share_out(share, shares, items);
    for (; started < owners; started++) {
        work[started] = (struct work){share, shares, started, taken};
        if (pthread_create(&thread[started], NULL, take, &work[started])) break;
    }
    for (int i = 0; i < started; i++) pthread_join(thread[i], NULL);
    free(share);
    return started;
}
"""


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of `PROGRAM`."""
    if not shutil.which(COMPILER):
        pytest.skip(f"no C compiler ({COMPILER}) to compile shares.h with")
    folder = tmp_path_factory.mktemp("shares")
    source, library = folder / "program.c", folder / "program.so"
    source.write_text(PROGRAM)
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([COMPILER, *flags, f"-I{SRC}", str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


@each("items", [0, 1, 7, 10_000])
@each("threads, owners", [(1, 1), (2, 2), (2, 1), (7, 4)])
def test_every_item_is_taken_once(shares, threads, owners, items):
    for _ in range(20):
        taken = np.zeros(max(items, 1), np.intc)
        started = shares.run(
            threads, owners, ctypes.c_ssize_t(items), ctypes.c_void_p(taken.ctypes.data)
        )
        assert started == owners
        assert (taken[:items] == 1).all()

"""Strata's speed beside llama.cpp's and beside its own, measured in one run and written down as ratios.

    python -m tests.bench                   measure the embedded model, write tests/bench/results/latest.*
    python -m tests.bench --quick           fewer repeats, for a first look
    python -m tests.bench --update-readme   put the latest results between the README's marks

Machines differ and so does their company, hence the method: our side and the peer's take turns (A B, B A, A B ...),
each pair gives one ratio, and the median, least and greatest of these are told. A pair during which other programs
used the processors is measured again. Nothing here passes or fails.

The peer is llama.cpp as `make bench-peer` builds it, or whatever folder STRATA_BENCH_PEER names. Like is compared with
like: HTTP with llama-server, the engine with llama-bench and llama-batched-bench, each kernel with what the processor
can do at most, as `probe.c` finds it in the same minute.

Three sections need no peer. They set the engine in one state beside itself in another: `windows` a decode window of
several rows beside one of a single row, `company` a long prompt and two streams together beside each by itself, for
several settings, and `drafts` the chosen depth of drafts beside every fixed one, by the kind of text. Each takes about
three minutes a model at most, or one with --quick.
"""

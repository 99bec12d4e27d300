"""Counts words: a first job. Run it with `.venv/bin/python examples/first_job.py`."""

import tidegate as tg


class Count(tg.KeyedProcess):
    count = tg.value("long", default=0)  # state: one number for each word

    def process(self, record, ctx):
        self.count.set(self.count.get() + 1)
        yield record.word, self.count.get()


job = tg.Job("word count", slots=2)
lines = job.source("lines", tg.sources.rows([("the tide comes in",), ("the tide goes out",)], "line string"))
words = lines.flat_map(lambda record: [(word,) for word in record.line.split()], returns="word string")
words.key_by("word").process("count", Count(), returns="word string, n long").to("counts", tg.sinks.print())
job.run()

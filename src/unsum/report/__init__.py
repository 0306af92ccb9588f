"""`report`: one page on a model and a batch.

`collect` and `measure` take the statistics of one forward and backward, `bysample` the gradient of each sample, `flags`
says what deserves a look, `words` puts the text to the tokens; `page`, `tables` and `charts` write the HTML.
"""

from unsum.report.data import Report
from unsum.report.make import report

__all__ = ["Report", "report"]

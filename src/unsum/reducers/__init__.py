"""Reducers: numbers from factors while backward runs, parameter by parameter, so that nothing is kept."""

from unsum.reducers.kronecker import Kronecker as Kronecker
from unsum.reducers.moments import SecondMoment as SecondMoment
from unsum.reducers.norms import Norms as Norms
from unsum.reducers.project import Project as Project
from unsum.reducers.reducer import SQ_NORMS as SQ_NORMS
from unsum.reducers.reducer import WEIGHTED_SUM as WEIGHTED_SUM
from unsum.reducers.reducer import Reading as Reading
from unsum.reducers.reducer import Reducer as Reducer
from unsum.reducers.tokens import TokenNorms as TokenNorms
from unsum.reducers.weighted import WeightedSum as WeightedSum

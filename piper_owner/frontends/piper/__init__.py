"""Models annotated as for Piper: regions of ordinary model code, traced and split into pipeline stages.

class Model(nn.Module):
    def forward(self, ids):
        with piper_owner.annotate("PP"):
            hidden = self.embed(ids)
        with piper_owner.annotate("PP"):
            return self.head(hidden)

traced = trace(Model(), ids)    # two segments; a tie of embed.weight and head.weight, if they are one
"""

from __future__ import annotations

from piper_owner.frontends.piper.annotation import annotate
from piper_owner.frontends.piper.segment import Segment
from piper_owner.frontends.piper.source import AnnotatedModel
from piper_owner.frontends.piper.trace import TracedModel, trace

__all__ = ["AnnotatedModel", "Segment", "TracedModel", "annotate", "trace"]

"""How widely heads look, of :func:`dsv3_jax.inspection.capture`'s attention entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_entropy(entropy: Float[np.ndarray, "L B H T"]) -> Figure:
    """Left, each head's entropy over that of attention to all it sees alike, averaged over
    queries; right, each layer's entropy by the query's place."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    L, _, H, T = entropy.shape
    even = np.log(np.arange(T) + 1)
    figure = new_figure(10.5, 3.6)
    heads, places = figure.subplots(1, 2, width_ratios=(1, 1.5))
    share = entropy[..., 1:].sum((1, 3)) / (entropy.shape[1] * even.sum())
    image = heads.imshow(share, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for layer, head in np.ndindex(L, H) if L * H <= 256 else ():
        color = "black" if share[layer, head] > 0.6 else "white"
        heads.text(head, layer, f"{share[layer, head]:.2f}", color=color, ha="center", va="center")
    heads.set(xlabel="head", ylabel="layer", title="entropy / log(keys in sight)")
    for axis in (heads.xaxis, heads.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=heads)
    places.plot(even, ":", color="0.3", label="all keys alike")
    for layer, values in enumerate(entropy.mean((1, 2))):
        color = colormaps["plasma"](0.9 * layer / max(L - 1, 1))
        places.plot(values, lw=1, color=color, label=f"layer {layer}" if L <= 12 else None)
    places.set(xlabel="query's place", ylabel="nats, mean of heads", title="by place")
    places.grid(alpha=0.3)
    places.legend(loc="lower right", fontsize="small", ncols=3)
    return figure

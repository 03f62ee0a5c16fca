"""Plot of the entropy of attention probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from dsv3_jax.viz.canvas import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def attention_entropy(entropy: Float[np.ndarray, "L B H T"]) -> Figure:
    """Plots the attention entropy by head and by position.

    The left panel has the entropy of each head, averaged over queries, divided by the entropy of
    uniform attention to all visible keys. The right panel has the entropy of each layer, averaged
    over heads, by the position of the query.

    Args:
      entropy: entropies in nats, as :func:`dsv3_jax.inspection.capture` returns them.
    """
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    L, _, H, T = entropy.shape
    uniform = np.log(np.arange(T) + 1)
    figure = new_figure(10.5, 3.6)
    heads, positions = figure.subplots(1, 2, width_ratios=(1, 1.5))
    share = entropy[..., 1:].sum((1, 3)) / (entropy.shape[1] * uniform.sum())
    image = heads.imshow(share, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for layer, head in np.ndindex(L, H) if L * H <= 256 else ():
        color = "black" if share[layer, head] > 0.6 else "white"
        heads.text(head, layer, f"{share[layer, head]:.2f}", color=color, ha="center", va="center")
    heads.set(xlabel="head", ylabel="layer", title="entropy / log(number of visible keys)")
    for axis in (heads.xaxis, heads.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=heads)
    positions.plot(uniform, ":", color="0.3", label="uniform attention")
    for layer, values in enumerate(entropy.mean((1, 2))):
        color = colormaps["plasma"](0.9 * layer / max(L - 1, 1))
        positions.plot(values, lw=1, color=color, label=f"layer {layer}" if L <= 12 else None)
    positions.set(
        xlabel="position of the query",
        ylabel="entropy (nats, mean over heads)",
        title="entropy by position",
    )
    positions.grid(alpha=0.3)
    positions.legend(loc="lower right", fontsize="small", ncols=3)
    return figure

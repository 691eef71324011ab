"""Multi-head latent attention: cached rows that all heads share, and matrices of heads into and out of them."""

"""VeloxQuant-MLX's TurboQuantKVCache beside tqstore's: errors of attention and bytes."""

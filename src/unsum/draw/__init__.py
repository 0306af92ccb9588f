"""The autograd graph as a picture: graph → scene → folding → layout → SVG."""

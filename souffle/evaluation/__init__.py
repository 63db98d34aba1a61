"""What is told of networks beside the papers: the rows of an ablation, and the papers' tables with ours beside them."""

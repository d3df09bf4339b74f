"""Weight updates from trainer ranks to engines. Each package is one process, or shared by all of them."""

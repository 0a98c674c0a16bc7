"""TAO in real time: what the gateway and the Ray Serve application share."""

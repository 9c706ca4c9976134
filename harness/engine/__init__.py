"""Workers: an HTTP front that speaks SGLang's PD protocol over a compute backend."""

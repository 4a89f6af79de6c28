"""The engine without torch: the packed pass as one ONNX graph, run by ONNX Runtime."""

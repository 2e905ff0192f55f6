"""What a step needs around it: loss scaling, copies to go back to, the modules around parameters, gradients."""

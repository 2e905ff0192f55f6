"""Image classification in double precision, where several ranks differ from one process only in the last digits."""

from torch.nn import functional as F

from llqr.lab.tasks.classification import ClassificationTask


class DoubleTask(ClassificationTask):
    def place(self, model):
        return super().place(model).double()

    def forward(self, model, inputs):
        return model(inputs.double())

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, label_smoothing=self._smoothing)

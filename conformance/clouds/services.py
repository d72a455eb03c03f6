"""What the login services of all clouds share: they receive a whole request, and answer or refuse it.

Invariant: a request that no correct client sends is refused *and* recorded in `journal.violations`,
without its secrets.
"""

from __future__ import annotations

import json

from ..http import Reception, Site, receive_whole
from ..messages import Answer, Request, Response
from ..tokens import read_form

__all__ = ["Refused", "Services", "as_json", "check_fields", "demand", "form_of"]


class Refused(Exception):
    """A service refuses a request, with a status, an error code and a text."""

    def __init__(self, status: int, code: str, text: str, *, is_mistake: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text
        self.is_mistake = is_mistake  # whether no correct client sends such a request


class Services(Site):
    """The services of one cloud. A subclass has their answers and the form of their refusals."""

    def kind_of(self, request: Request) -> str:
        """Return "login": at these services, clients send credentials without a challenge."""
        return "login"

    def start(self, request: Request) -> Answer | Reception:
        """Receive the body, which must be short, then answer."""
        request.kind = "login"
        return receive_whole(lambda body: self._answer_or_refuse(request, body))

    def _answer_or_refuse(self, request: Request, body: bytes) -> Response:
        try:
            return self.answer(request, body)
        except Refused as refused:
            if refused.is_mistake:
                place = request.header("host") + request.path
                self.journal.violations.append(f"{request.method} {place}: {refused.text}")
            return self.refusal(request, refused)

    def answer(self, request: Request, body: bytes) -> Response:
        """Return the answer to a request. Raises Refused."""
        raise NotImplementedError

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Return a refusal in the form of its service."""
        raise NotImplementedError


def demand(is_right: object, text: str, status: int = 400) -> None:
    """Refuse a mistake: raises Refused unless a request is as every correct client sends it."""
    if not is_right:
        raise Refused(status, "invalid_request", text, is_mistake=True)


def form_of(request: Request, body: bytes) -> dict[str, str]:
    """Return the fields of a form. Raises Refused unless it is one."""
    kind = request.header("content-type").partition(";")[0]
    demand(kind == "application/x-www-form-urlencoded", "Content-Type is not a form's")
    form = read_form(body)
    demand(form is not None, "the form is malformed")
    return form or {}


def check_fields(form: dict[str, str], required: str, optional: str = "") -> None:
    """Raise Refused unless a form has all required fields and no unknown one, each with a value."""
    lacking = {*required.split()} - {*form}
    strange = {*form} - {*required.split(), *optional.split()}
    demand(not lacking and not strange, f"the form lacks {lacking}, has {strange} besides")
    demand(all(form.values()), "a field has no value")


def as_json(status: int, document: object, kind: str = "application/json") -> Response:
    """Return an answer with a document."""
    return Response(status, [("Content-Type", kind)], json.dumps(document).encode())

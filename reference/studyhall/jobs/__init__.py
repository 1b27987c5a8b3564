"""The job types of StudyHall: what runs where, how often it is tried and how long it may take."""

from studyhall import stages
from studyhall.patterns.core.job import Deadline
from studyhall.patterns.flow import OnFailure, chain
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.rate_limit import named_tenant
from studyhall.patterns.retry import AI, DOCUMENTS
from studyhall.patterns.typed_jobs import JobTypes

from . import (
    answer_question,
    connection_explanations,
    document_processing,
    graph_generation,
    maintenance,
    quiz_creation,
)

__all__ = ["job_types", "study_flow"]


def job_types() -> JobTypes:
    """The registry that api, workers and command line share."""
    jobs = JobTypes()
    # Its parsers of strangers' files run in child processes (`services.pool`).
    jobs.register(
        name="document-processing",
        payload=document_processing.ProcessDocument,
        handler=document_processing.process_document,
        queue="documents",
        retry=DOCUMENTS,
        deadline=Deadline(60, growth=2, longest=300),
    )
    jobs.register(
        name="graph-generation",
        payload=graph_generation.GenerateGraph,
        handler=graph_generation.generate_graph,
        queue="graphs",
        retry=AI,
        deadline=Deadline(300, growth=1.5, longest=600),
    )
    jobs.register(
        name="quiz-creation",
        payload=quiz_creation.CreateQuiz,
        handler=quiz_creation.create_quiz,
        queue="quizzes",
        retry=AI,
        deadline=Deadline(120, growth=2, longest=300),
    )
    jobs.register(
        name="connection-explanations",
        payload=connection_explanations.ExplainConnections,
        handler=connection_explanations.explain_connections,
        queue="explanations",
        retry=AI,
        deadline=Deadline(180, growth=2, longest=600),
    )
    jobs.register(
        name="study-reminder", payload=maintenance.Remind, handler=maintenance.study_reminder, queue="reminders"
    )
    for name, handler, limit in (
        ("nightly-cleanup", maintenance.nightly_cleanup, 600),
        ("reconcile-documents", maintenance.reconcile_documents, 300),
        ("evaluate-health", maintenance.evaluate_health, 30),
    ):
        jobs.register(
            name=name, payload=maintenance.Nothing, handler=handler, queue="maintenance", deadline=Deadline(limit)
        )
    jobs.register(
        name="answer-question",
        payload=answer_question.AnswerQuestion,
        handler=answer_question.answer_question,
        queue="chat",
        retry=answer_question.CHAT,
        deadline=Deadline(930),  # the reply's own limit, its token's life, comes first
    )
    return jobs


STAGES = tuple(stages.STAGES)


def study_flow(document_id: str, owner: str) -> JobRequest:
    """extract -> graph -> quiz -> explanations: each waits for the one before, all are added or none."""
    payload = {"document_id": document_id, "owner": named_tenant(owner)}
    # A stage that failed for good keeps the later ones waiting; replayed as a dead letter, the flow goes on.
    steps = [JobRequest(name, payload, key=document_id, on_failure=OnFailure.WAIT) for name in STAGES]
    return chain(*steps)

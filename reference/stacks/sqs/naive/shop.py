"""The same shop as the SQS tutorials teach it: receive, work, delete; default settings, a publish after the commit."""

import json
import os
import sqlite3
import sys

import boto3
import requests

sqs, sns = boto3.client("sqs"), boto3.client("sns")
TOPIC = "arn:aws:sns:eu-central-1:123456789012:bought"


def connect():
    return sqlite3.connect(os.environ["STORE"])


def post(url, body):
    answer = requests.post(url, json=body, timeout=10)
    answer.raise_for_status()
    return answer.json()


def buy_label(parcel, address, crash=False):
    if crash:
        os.kill(os.getpid(), 9)
    if not address:
        raise ValueError("the parcel has no address")
    label = post(os.environ["CARRIER_URL"] + "/labels", {"parcel": parcel})
    with connect() as db:
        db.execute("INSERT INTO labels VALUES (?, ?)", (parcel, label["id"]))
    sns.publish(TopicArn=TOPIC, Message=json.dumps({"parcel": parcel, "label": label["id"]}))


def mail_label(parcel, label):
    post(os.environ["MAILER_URL"] + "/mails", {"parcel": parcel, "label": label})
    with connect() as db:
        db.execute("INSERT INTO mailed VALUES (?, ?)", (parcel, label))


def url_of(name):
    return sqs.get_queue_url(QueueName=name)["QueueUrl"]


def work():
    print("ready", flush=True)
    while True:
        for name, handle in (("labels", buy_label), ("mails", mail_label)):
            url = url_of(name)
            got = sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10, WaitTimeSeconds=1)
            for message in got.get("Messages", []):
                body = json.loads(message["Body"])
                try:
                    handle(**(json.loads(body["Message"]) if "Message" in body else body))
                    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
                except Exception as error:
                    print(f"{name}: {error!r}", flush=True)


def create():
    connect().executescript("CREATE TABLE labels (parcel, label); CREATE TABLE mailed (parcel, label)")
    dead = sqs.create_queue(QueueName="dead")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    for name in ("labels", "mails"):
        policy = json.dumps({"deadLetterTargetArn": arn, "maxReceiveCount": "5"})
        url = sqs.create_queue(QueueName=name, Attributes={"RedrivePolicy": policy})["QueueUrl"]
    endpoint = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    topic = sns.create_topic(Name="bought")["TopicArn"]
    sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=endpoint)


if __name__ == "__main__":
    if sys.argv[1] == "create":
        create()
    elif sys.argv[1] == "work":
        work()
    elif sys.argv[1] == "submit":
        address = "" if "--no-address" in sys.argv else os.environ["NOTE"]
        for parcel in [word for word in sys.argv[2:] if not word.startswith("--")]:
            body = {"parcel": parcel, "address": address, "crash": "--crash" in sys.argv}
            sqs.send_message(QueueUrl=url_of("labels"), MessageBody=json.dumps(body))

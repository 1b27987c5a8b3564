import dramatiq
import structlog
import taskiq
from huey import RedisHuey

logger = structlog.get_logger()
huey = RedisHuey()
broker = taskiq.InMemoryBroker()


@dramatiq.actor
def mail(to):
    try:
        deliver(to)
    except:  # fault: swallowed-error
        pass


@huey.task(retries=3)
def sync(account):
    attempt = 0
    while attempt < 5:  # fault: inner-retry
        try:
            return pull(account)
        except OSError:
            attempt += 1
            time.sleep(1)
    return None


@broker.task
async def login(user):
    logger.info("login", api_key=user.api_key)  # fault: secret-logged
    logger.info("login", user=user.id)
    time.sleep(5)  # fault: blocking-in-async


async def register(session, user):
    async with session.begin():
        session.add(user)
        mail.send(user.id)  # fault: publish-in-transaction
        await login.kiq(user.id)  # fault: publish-in-transaction


@dramatiq.actor
def mail_right(to):
    try:
        deliver(to)
    except Exception:
        logger.warning("not delivered")
        raise


@huey.task(retries=3)
def sync_right(account):
    return pull(account)

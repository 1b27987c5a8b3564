/**
 * A slash command whose work takes longer than Discord waits: deferReply, a job, and the reply edited when it is done.
 *
 * Promise: the command is acknowledged before anything else. A command that the gateway delivers twice is one job. The worker
 * writes the reply itself, with the token of the interaction, so a restart of the bot loses none; a retried write is the same
 * message again. With Redis away the user is told so.
 *
 * When it does not hold: the bot dies between deferReply and add (Discord shows "thinking…" until the token ends), and work
 * that takes more than 15 minutes: the token is dead by then. The token is in Redis for as long as the job is.
 */
import { type Job, type Queue, UnrecoverableError } from 'bullmq';
import {
  type ChatInputCommandInteraction, Client, DiscordAPIError, Events, GatewayIntentBits, MessageFlags, RESTJSONErrorCodes, type REST, Routes,
} from 'discord.js';
import { z } from 'zod';
import { JOB } from '../reliable.js';

// [discord]
export const Reply = z.object({ application: z.string(), token: z.string(), parcel: z.string().max(100) });
export type Command = Pick<ChatInputCommandInteraction, 'id' | 'applicationId' | 'token' | 'deferReply' | 'editReply' | 'options'>;
const TOKEN_LIFE = 14 * 60_000;

export async function onCommand(command: Command, queue: Queue): Promise<void> {
  try {
    // Before Redis and everything else: Discord waits three seconds.
    await command.deferReply({ flags: MessageFlags.Ephemeral });
  } catch (error) {
    // Another process has it, or it came too late to be answered.
    const gone = [RESTJSONErrorCodes.InteractionHasAlreadyBeenAcknowledged, RESTJSONErrorCodes.UnknownInteraction];
    if (error instanceof DiscordAPIError && gone.includes(Number(error.code))) return;
    throw error;
  }
  const data = { application: command.applicationId, token: command.token, parcel: command.options.getString('parcel', true) };
  try {
    // An answer is worth nothing after the token: fewer attempts, and gone soon, with the token.
    await queue.add('label-reply', data, { ...JOB, attempts: 4, jobId: `discord-${command.id}`, removeOnFail: { age: 3600 } });
  } catch {
    await command.editReply('Sorry, not now. Please try again in a minute.');
  }
}

/** In the worker, after the work: `editReply` without the bot. The same edit twice is one message. */
export async function reply(rest: REST, job: Job<z.infer<typeof Reply>>, content: string): Promise<void> {
  if (Date.now() - job.timestamp > TOKEN_LIFE) throw new UnrecoverableError('the token of the interaction has ended');
  const { application, token } = Reply.parse(job.data);
  await rest.patch(Routes.webhookMessage(application, token), { body: { content }, auth: false });
}
// [/discord]

/** bot(token, queue): the process that holds the gateway. */
export async function bot(token: string, queue: Queue): Promise<Client> {
  const client = new Client({ intents: [GatewayIntentBits.Guilds] });
  client.on(Events.InteractionCreate, (interaction) => {
    if (!interaction.isChatInputCommand() || interaction.commandName !== 'label') return;
    // A rejection that nobody catches ends the process.
    onCommand(interaction, queue).catch((error: Error) => console.error(`discord: ${error.message}`));
  });
  await client.login(token);
  return client;
}

/**
 * What one streamed answer is made of: steps, their tokens, and which piece of text belongs to which token.
 * Knows the trace of a chat chunk, no page.
 *
 * @typedef {object} Token
 * @property {string} text
 * @property {boolean} drafted the head guessed it and the target agreed
 * @property {Step} step
 * @property {number} position place among the step's tokens, from 1
 *
 * @typedef {object} Step
 * @property {number} number 0 for the pass that reads the prompt, then 1, 2, …
 * @property {number} at milliseconds since the request was sent
 * @property {Token[]} tokens
 * @property {number} drafted how many tokens the head guessed
 * @property {number} accepted
 * @property {string[]} refused the guesses that were not taken, the first refused one first
 *
 * @typedef {object} Piece
 * @property {"content"|"reasoning"} kind
 * @property {string} text
 * @property {Token|null} token null where the server sent no trace
 */

export class Answer {
  constructor() {
    /** @type {Step[]} */
    this.steps = [];
    /** @type {Piece[]} */
    this.pieces = [];
    /** @type {{id: string, name: string, arguments: string}[]} */
    this.toolCalls = [];
    this.timings = null;
    this.metrics = null;
    this.finishReason = null;
    this._unplaced = [];
    this._chunks = [];
  }

  /** The answer that `toJSON` was asked of. */
  static from({ chunks, end }) {
    const answer = new Answer();
    for (const [at, delta, headlong] of chunks) answer.add({ headlong, choices: [{ delta }] }, at);
    return Object.assign(answer, end);
  }

  /** What it takes to show the answer again: what its chunks said. */
  toJSON() {
    const { timings, metrics, finishReason } = this;
    return { chunks: this._chunks, end: { timings, metrics, finishReason } };
  }

  /** The same without its trace: the text alone, for where there is no room for more. */
  untraced() {
    const calls = this.toolCalls.map(({ id, ...called }, index) => ({ index, id, function: called }));
    const delta = { reasoning_content: this.reasoning, content: this.text, tool_calls: calls };
    return { ...this.toJSON(), chunks: [[0, delta]] };
  }

  /**
   * @param {object} chunk a chat completion chunk
   * @param {number} at milliseconds since the request was sent
   * @returns {Piece[]} the text it added
   */
  add(chunk, at) {
    if (chunk.headlong?.tokens?.length) this._addStep(chunk.headlong, at);
    this.timings = chunk.timings ?? this.timings;
    this.metrics = chunk.metrics ?? this.metrics;
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    this.finishReason = choice.finish_reason ?? this.finishReason;
    const delta = choice.delta ?? {};
    this._keep(at, delta, chunk.headlong);
    for (const call of delta.tool_calls ?? []) this._addToolCall(call);
    const added = [...this._place("reasoning", delta.reasoning_content), ...this._place("content", delta.content)];
    this.pieces.push(...added);
    return added;
  }

  get text() {
    return this._texts("content");
  }

  get reasoning() {
    return this._texts("reasoning");
  }

  /** The tool calls that are there to be carried out: one that was cut off is not. */
  get calls() {
    return this.finishReason === "tool_calls" ? this.toolCalls.filter(Boolean) : [];
  }

  get tokens() {
    return this.steps.flatMap((step) => step.tokens);
  }

  /** The server's own count and speed once they came, else what was seen so far. */
  figures() {
    const decoding = this.decodingSteps;
    const numTokens = this.timings?.predicted_n ?? this.tokens.length;
    const sum = (field) => decoding.reduce((total, step) => total + step[field], 0);
    const decoded = decoding.reduce((total, step) => total + step.tokens.length, 0);
    const first = this.steps[0]?.at ?? 0;
    const elapsed = (this.steps.at(-1)?.at ?? 0) - first;
    return {
      tokens: numTokens,
      perSecond: this.timings?.predicted_per_second ?? (elapsed > 0 ? (1000 * decoded) / elapsed : null),
      steps: decoding.length,
      perStep: decoding.length ? decoded / decoding.length : null,
      drafted: this.timings?.draft_n ?? sum("drafted"),
      accepted: this.timings?.draft_n_accepted ?? sum("accepted"),
      k: decoding.length ? sum("drafted") / decoding.length : 0,
      noDrafts: this.metrics?.reason ?? null,
    };
  }

  /** The steps after the pass that read the prompt. */
  get decodingSteps() {
    return this.steps.filter((step) => step.number > 0);
  }

  _addStep(trace, at) {
    const step = {
      number: this.steps.length ? this.steps.at(-1).number + 1 : Number(trace.num_drafted > 0),
      at,
      tokens: [],
      drafted: trace.num_drafted ?? 0,
      accepted: trace.num_accepted ?? 0,
      refused: trace.rejected ?? [],
    };
    step.tokens = trace.tokens.map(({ text, drafted }, i) => ({ text, drafted, step, position: i + 1 }));
    this.steps.push(step);
    for (const token of step.tokens) if (token.text) this._unplaced.push({ token, rest: token.text });
  }

  /**
   * Finds the tokens a text came from. Text may lag behind its tokens (a possible stop string is held back), and
   * some tokens never become text (the marks around reasoning), so it is looked up among those not yet placed.
   */
  _place(kind, text) {
    if (!text) return [];
    let skip = this._unplaced.map(({ rest }) => rest).join("").indexOf(text);
    if (skip < 0) return [{ kind, text, token: this._unplaced[0]?.token ?? this.tokens.at(-1) ?? null }];
    const pieces = [];
    let missing = text.length;
    while (missing > 0) {
      const entry = this._unplaced[0];
      const dropped = Math.min(skip, entry.rest.length);
      const taken = entry.rest.slice(dropped, dropped + missing);
      skip -= dropped;
      missing -= taken.length;
      entry.rest = entry.rest.slice(dropped + taken.length);
      if (taken) pieces.push({ kind, text: taken, token: entry.token });
      if (!entry.rest) this._unplaced.shift();
    }
    return pieces;
  }

  _texts(kind) {
    return this.pieces.filter((piece) => piece.kind === kind).map((piece) => piece.text).join("");
  }

  _keep(at, { content, reasoning_content, tool_calls }, trace) {
    const has = content || reasoning_content || tool_calls?.length || trace?.tokens?.length;
    if (has) this._chunks.push([Math.round(at), { content, reasoning_content, tool_calls }, trace]);
  }

  _addToolCall(call) {
    const known = (this.toolCalls[call.index ?? 0] ??= { id: "", name: "", arguments: "" });
    known.id ||= call.id ?? "";
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
}

/** The head's guesses in order, those the target took first. */
export function guesses(step) {
  return [...step.tokens.filter((token) => token.drafted).map((token) => token.text), ...step.refused];
}

/** How many guesses lay after the end of the text; nobody was told what they were. */
export function beyondEnd(step) {
  return step.drafted - guesses(step).length;
}

/** The target's own token of a step; null where the answer ended on an accepted draft. */
export function ownToken(step) {
  const last = step.tokens.at(-1);
  return last && !last.drafted ? last : null;
}

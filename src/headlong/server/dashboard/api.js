/**
 * Talks to the server: JSON, event streams, and the API key. Knows no page; errors carry sentences fit to show.
 */

const KEY_NAME = "headlong-api-key";

/** The server answered, with an error. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** The server did not answer, or stopped in the middle. */
export class ConnectionLost extends Error {}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY_NAME) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY_NAME, key) : sessionStorage.removeItem(KEY_NAME)),
};

export async function getJson(path) {
  return (await request(path, {})).json();
}

/** The chunks of a streamed chat completion. */
export function streamChat(body, signal) {
  return streamPost("/v1/chat/completions", body, signal);
}

/**
 * The events that answer a request. Ends only after `[DONE]`; anything less is a `ConnectionLost`.
 * @param {string} path
 * @param {object} body the request without `stream`
 * @param {AbortSignal} [signal]
 */
export async function* streamPost(path, body, signal) {
  const response = await request(path, {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message ?? "The server reported an error.", response.status);
    yield chunk;
  }
  throw new ConnectionLost("The connection was cut before the answer was complete.");
}

/** The snapshots of `/v1/stats/stream`, for as long as the server sends them. */
export async function* streamStats(signal) {
  const response = await request("/v1/stats/stream", { signal });
  for await (const data of events(response)) yield JSON.parse(data);
}

async function request(path, options) {
  const headers = {};
  if (options.body) headers["Content-Type"] = "application/json";
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("The server cannot be reached.");
  }
  if (!response.ok) throw new ApiError(await errorMessage(response), response.status);
  return response;
}

async function errorMessage(response) {
  const text = await response.text().catch(() => "");
  try {
    const message = JSON.parse(text).error.message;
    if (typeof message === "string" && message) return message;
  } catch {
    // Not the server's own error body: a proxy's page, for example. Its status says enough.
  }
  return `The server answered ${response.status} ${response.statusText}`.trim();
}

/** The `data` of each server-sent event, whatever way the bytes were cut. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (pending + value).split("\n");
      pending = lines.pop();
      for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ConnectionLost("The connection was cut.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

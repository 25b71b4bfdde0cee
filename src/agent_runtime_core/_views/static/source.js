// Where the data comes from: the HTTP API of this server, or the JSON inside an exported file.

/** A request that failed. `problem` is the body of the response (RFC 9457), if it has one. */
export class ApiError extends Error {
  constructor(status, problem) {
    super((problem && (problem.detail || problem.title)) || "The server does not answer.");
    this.status = status;
    this.problem = problem || {};
  }
}

/** Return the path of something of a run, for `get` and `send`. */
export function runPath(runId, ...rest) {
  return ["runs", runId, ...rest].map(encodeURIComponent).join("/");
}

/** Add parameters to a path. A list is a parameter that is repeated. */
export function withQuery(path, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params || {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "") query.append(name, each);
    }
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

// JSON.stringify writes a BigInt as the integer that it is.
BigInt.prototype.toJSON = function () {
  return JSON.rawJSON(this.toString());
};

/** Parse JSON, wherever it is from. An integer that is no safe number is a BigInt, so it is shown and sent back unchanged. */
export function parsed(text) {
  if (!JSON.rawJSON || !/\d{16}/.test(text)) return JSON.parse(text);
  return JSON.parse(text, (key, value, { source: digits }) =>
    typeof value === "number" && Math.abs(value) > Number.MAX_SAFE_INTEGER && /^-?\d+$/.test(digits) ? BigInt(digits) : value);
}

async function request(url, options) {
  const response = await fetch(url, options).catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError(0, null);
  });
  const text = await response.text();
  let body = null;
  try {
    body = text ? parsed(text) : null;
  } catch {
    body = null;
  }
  // The frame shows the sign-in page, wherever the request came from.
  if (response.status === 401) dispatchEvent(new Event("signed-out"));
  if (!response.ok) throw new ApiError(response.status, body);
  return body;
}

function overHttp() {
  const base = new URL("api/v1/", document.baseURI);
  return {
    exported: false,
    get: (path, params, signal) =>
      request(new URL(withQuery(path, params), base), { headers: { Accept: "application/json" }, signal }),
    send: (method, path, body, headers) =>
      request(new URL(path, base), {
        method,
        headers: {
          Accept: "application/json",
          "X-Agent-Runtime": "1",
          ...(body !== undefined && { "Content-Type": "application/json" }),
          ...headers,
        },
        body: JSON.stringify(body),
      }),
    eventsUrl: (runId, params) => new URL(withQuery(`${runPath(runId)}/events`, params), base),
  };
}

function fromFile(element) {
  const answers = parsed(element.textContent);
  return {
    exported: true,
    about: answers.about,
    get: async (path) => {
      if (!(path in answers)) throw new ApiError(404, { detail: "The exported file has no such data." });
      return answers[path];
    },
  };
}

const data = document.getElementById("exported-data");

/** `get(path, params)` reads, `send(method, path, body)` acts. Both raise `ApiError`. */
export const source = data ? fromFile(data) : overHttp();

/** The time for which the data is true, in milliseconds: the present, or when the file was written. */
export function now() {
  return source.exported ? Date.parse(source.about.exported_at) : Date.now();
}

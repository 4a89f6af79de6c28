// Lets a test call functions that use one client library; what scripts/serve.py is to Python's.
import { writeSync } from "node:fs";
import { createInterface } from "node:readline";

export async function serve(functions) {
  const answers = Number(process.argv.at(-1));
  for await (const line of createInterface({ input: process.stdin })) {
    const call = JSON.parse(line);
    let answer;
    try {
      answer = { result: await functions[call.function](call.arguments) };
    } catch (error) {
      answer = { error: describe(error) };
    }
    write(answers, Buffer.from(JSON.stringify(answer) + "\n"));
  }
}

function describe(error) {
  const classes = [];
  for (let kind = Object.getPrototypeOf(error); kind; kind = Object.getPrototypeOf(kind)) {
    classes.push(kind.constructor.name);
  }
  const { status, statusCode, status_code, code, param, type, requestID } = error;
  return { classes, message: error.message, fields: { status, statusCode, status_code, code, param, type, requestID } };
}

function write(descriptor, bytes) {
  for (let written = 0; written < bytes.length; ) {
    written += writeSync(descriptor, bytes, written);
  }
}

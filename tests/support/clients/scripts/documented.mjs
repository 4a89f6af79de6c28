// A block of docs/clients.md: leaves the vectors of its texts in `vectors`.
const { serve } = await import(process.argv[1]);
const { writeFileSync, rmSync } = await import("node:fs");

await serve({
  async run({ code }) {
    // In a file beside the packages: a module looks for them from where it lies.
    const file = `${process.cwd()}/documented-${process.pid}.mjs`;
    writeFileSync(file, `${code}\nexport default vectors;\n`);
    try {
      return (await import(file)).default;
    } finally {
      rmSync(file);
    }
  },
});

import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;

/** The JDK's client as it is by default, which offers h2c with every request. Prints "what status version num_bytes". */
public class Wire {
    public static void main(String[] args) throws Exception {
        var client = HttpClient.newHttpClient();
        var body = "{\"input\":\"hi\"}".getBytes("UTF-8");
        var large = ("{\"input\":[\"" + "hello ".repeat(50_000) + "\"]}").getBytes("UTF-8");
        var known = HttpRequest.BodyPublishers.ofByteArray(body);
        var chunked = HttpRequest.BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body));
        var largeChunked = HttpRequest.BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(large));
        ask(client, "content-length", to(args[0]).POST(known));
        ask(client, "chunked", to(args[0]).POST(chunked));
        ask(client, "large", to(args[0]).POST(HttpRequest.BodyPublishers.ofByteArray(large)));
        ask(client, "large-chunked", to(args[0]).POST(largeChunked));
        ask(client, "expect", to(args[0]).expectContinue(true).POST(known));
        ask(client, "expect-chunked", to(args[0]).expectContinue(true).POST(chunked));
        // Not: one that expects 100 Continue and is refused. JDK 17 then reads the answer's body twice, and waits for ever.
        ask(client, "get", to(args[0]).GET());
        ask(client, "again", to(args[0]).POST(known));
    }

    static HttpRequest.Builder to(String url) {
        return HttpRequest.newBuilder(URI.create(url)).timeout(Duration.ofSeconds(60));
    }

    static void ask(HttpClient client, String what, HttpRequest.Builder request) throws Exception {
        var answer = client.send(request.build(), HttpResponse.BodyHandlers.ofByteArray());
        System.out.println(what + " " + answer.statusCode() + " " + answer.version() + " " + answer.body().length);
    }
}

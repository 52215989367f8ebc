package openai

import (
	"bytes"
	"mime/multipart"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/mooncake"
)

func TestErrorsHaveOpenAIsShape(t *testing.T) {
	_, e := Parse(mooncake.Chat, []byte(chat(`"n":"<5>"`)), usual)
	require.JSONEq(t, `{"error":{"message":"\"n\" is \"<5>\"; it must be an integer from 1 to 8","type":"invalid_request_error","param":"n","code":"invalid_type"}}`, string(e.JSON()))
	require.EqualError(t, e, `400 invalid_type: n: "n" is "<5>"; it must be an integer from 1 to 8`)
	for status, typ := range map[int]string{
		401: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error", 502: "server_error", 503: "server_error",
	} {
		require.Equal(t, typ, NewError(status, "x", "y").Type)
		require.JSONEq(t, `{"error":{"message":"y","type":"`+typ+`","param":null,"code":null}}`, string((&Error{Status: status, Message: "y"}).JSON()))
	}
}

func TestAnEnginesOwnRefusalKeepsItsBytes(t *testing.T) {
	raw := `{"object":"error","message":"too long","code":400}`
	require.Equal(t, raw, string((&Error{Status: 400, Message: "ours", Raw: []byte(raw)}).JSON()))
}

// A packed body of 1 KB may hold a name of megabytes. Errors and the request log repeat only the
// beginning of it.
func TestAnErrorRepeatsLittleOfWhatAClientWrote(t *testing.T) {
	long := strings.Repeat("<", 1<<20)
	for name, raw := range map[string]string{
		"a model":        `{"model":"` + long + `","prompt":"hi"}`,
		"a key twice":    `{"model":"m","prompt":"hi","pd_` + long + `":1,"pd_` + long + `":1}`,
		"a reserved key": `{"model":"m","prompt":"hi","pd_` + long + `":1}`,
	} {
		r, fail := Parse(mooncake.Completions, []byte(raw), Limits{})
		if fail != nil {
			require.Less(t, len(fail.JSON()), 16<<10, name)
		}
		if r != nil {
			require.LessOrEqual(t, len(r.Model), maxModelBytes, name)
		}
	}
}

// The same holds for requests that one engine serves whole: for a key that has a medium somewhere
// below it, and for a form.
func TestAnErrorOfAPassedRequestRepeatsLittleOfIt(t *testing.T) {
	long := strings.Repeat("<", 1<<20)
	r, fail := ParsePassed([]byte(`{"model":"m","`+long+`":{"type":"image_url","image_url":"http://10.0.0.1/"}}`), Limits{})
	require.Nil(t, r)
	require.Less(t, len(fail.JSON()), 16<<10)

	var form bytes.Buffer
	w := multipart.NewWriter(&form)
	require.NoError(t, w.WriteField("model", long[:maxFieldBytes]))
	require.NoError(t, w.Close())
	r, fail = ParseForm(form.Bytes(), w.FormDataContentType(), Limits{})
	require.Nil(t, r)
	require.Less(t, len(fail.JSON()), 16<<10)
}

/* What Modules/_ssl.c of CPython is compiled with in front of it (Setup.local). With OpenSSL nothing of it
   is needed. With AWS-LC it keeps TLS inside the FIPS module: TLS 1.2 and 1.3 with AES-GCM and the curves
   of NIST, whatever a caller asks for. Certificates are judged as OpenSSL's security level 2 does, and
   errors have the names that they have there. */
#if __has_include(<openssl/is_awslc.h>)

#include <Python.h> /* before any header of the C library */
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <string.h>

/* AWS-LC has no authentication after the handshake, which this program does not use. */
#define SSL_VERIFY_POST_HANDSHAKE 0
#define SSL_set_post_handshake_auth(ssl, is_on) ((void)(is_on))
#define SSL_CTX_set_post_handshake_auth(context, is_on) ((void)(is_on))
#define SSL_verify_client_post_handshake(ssl) 0

/* Of OpenSSL's x509_vfy.h, which AWS-LC does not have; _regsync/net/trust.py has words for them. */
#define EE_KEY_TOO_SMALL 66
#define CA_KEY_TOO_SMALL 67
#define CA_MD_TOO_WEAK 68

static int is_weak_key(X509 *certificate)
{
    EVP_PKEY *key = X509_get0_pubkey(certificate);
    return EVP_PKEY_id(key) == EVP_PKEY_RSA ? EVP_PKEY_bits(key) < 2048 : EVP_PKEY_bits(key) < 224;
}

static int is_weak_signature(X509 *certificate)
{
    int digest = NID_undef;
    int known = OBJ_find_sigid_algs(X509_get_signature_nid(certificate), &digest, NULL);
    return known && (digest == NID_sha1 || digest == NID_md5 || digest == NID_md4);
}

/* Verify a chain. Nobody verifies the signature of the anchor, its last certificate. */
static int verify_chain(X509_STORE_CTX *context, void *unused)
{
    if (X509_verify_cert(context) != 1)
        return 0;

    STACK_OF(X509) *chain = X509_STORE_CTX_get0_chain(context);
    size_t last = sk_X509_num(chain) - 1;
    for (size_t i = 0; i <= last; i++) {
        X509 *certificate = sk_X509_value(chain, i);
        int error = X509_V_OK;
        if (is_weak_key(certificate))
            error = i == 0 ? EE_KEY_TOO_SMALL : CA_KEY_TOO_SMALL;
        else if (i < last && is_weak_signature(certificate))
            error = CA_MD_TOO_WEAK;
        if (error != X509_V_OK) {
            X509_STORE_CTX_set_error(context, error);
            return 0;
        }
    }
    return 1;
}

static SSL_CTX *new_context(const SSL_METHOD *method)
{
    SSL_CTX *context = SSL_CTX_new(method);
    if (!context)
        return NULL;
    SSL_CTX_set_cert_verify_callback(context, verify_chain, NULL);
    if (SSL_CTX_set_ciphersuites(context, "TLS_AES_256_GCM_SHA384:TLS_AES_128_GCM_SHA256")
        && SSL_CTX_set1_curves_list(context, "P-256:P-384:P-521")
        && SSL_CTX_set1_sigalgs_list(context,
            "ECDSA+SHA256:RSA-PSS+SHA256:RSA+SHA256:ECDSA+SHA384:RSA-PSS+SHA384:RSA+SHA384"
            ":ECDSA+SHA512:RSA-PSS+SHA512:RSA+SHA512"))
        return context;
    SSL_CTX_free(context);
    return NULL;
}

static int set_ciphers(SSL_CTX *context, const char *wanted)
{
    return SSL_CTX_set_cipher_list(context, "ECDHE+AESGCM");
}

/* Look up the name of an error by (library, reason), or of a library. CPython's table has the numbers of
   OpenSSL, so that AWS-LC's own name replaces it. */
static PyObject *find_name(PyObject *names, PyObject *key)
{
    int library, reason;
    if (PyTuple_Check(key) && PyArg_ParseTuple(key, "ii", &library, &reason)) {
        const char *name = ERR_reason_error_string(ERR_PACK(library, reason));
        if (name && strcmp(name, "HANDSHAKE_FAILURE_ON_CLIENT_HELLO") == 0)
            name = "SSLV3_ALERT_HANDSHAKE_FAILURE"; /* as OpenSSL names this alert at any time */
        PyObject *known = PyUnicode_FromString(name ? name : "UNKNOWN");
        int status = known ? PyDict_SetItem(names, key, known) : -1;
        Py_XDECREF(known);
        if (status < 0)
            return NULL;
    }
    return PyDict_GetItemWithError(names, key);
}

#define SSL_CTX_new new_context
#define SSL_CTX_set_cipher_list set_ciphers
#define PyDict_GetItemWithError find_name

#endif
